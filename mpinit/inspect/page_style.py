"""How the report's page looks, and the little that it does."""

from __future__ import annotations

from typing import Final

STYLE: Final = """
:root{--bg:#fbfaf8;--fg:#1d1f23;--soft:#666b75;--line:#dfdcd6;--card:#fff;--bad:#b3261e;--badbg:#fdeceb;
--good:#1b6e3c;
--float32:#3567b0;--float16:#d1711b;--bfloat16:#2a8f7a;--mixed:#8b7bb8;--k0:#3567b0;--k1:#8fb3e0;--k2:#d9a441;--k3:#9a8f80}
@media (prefers-color-scheme:dark){:root{--bg:#15171b;--fg:#e8e6e1;--soft:#a0a4ad;--line:#33373f;--card:#1d2026;
--bad:#ff9a90;--badbg:#3a1f1e;--good:#7fd6a0;--float32:#7aa7e8;--float16:#f0a35c;--bfloat16:#5fc9b0;--mixed:#b5a6e0;
--k0:#6b9be0;--k1:#3f5f8f;--k2:#d9a441;--k3:#6f675c}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--fg);font:15px/1.5 system-ui,sans-serif}
main{max-width:76rem;margin:0 auto;padding:1.5rem 1rem 4rem}
h1{font-size:1.6rem;margin:.2rem 0 1rem;overflow-wrap:anywhere}h2{font-size:1.1rem;margin:2rem 0 .6rem}
code{font:.92em ui-monospace,monospace;overflow-wrap:anywhere}small,.note,.legend{color:var(--soft);font-size:.85em}
.note{margin:.8rem 0 0}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(9.5rem,1fr));gap:.6rem}
.tile{background:var(--card);border:1px solid var(--line);border-radius:.5rem;padding:.6rem .8rem}
.tile b{display:block;font-size:1.35rem;font-variant-numeric:tabular-nums}.tile span{color:var(--soft);
font-size:.85em}
.tile.bad b{color:var(--bad)}.tile.good b{color:var(--good)}
.legend{margin:.2rem 0 .6rem}.legend span{margin-right:1rem;white-space:nowrap}
.legend i{display:inline-block;width:.8em;height:.8em;border-radius:2px;margin-right:.35em}
table{border-collapse:collapse;width:100%}
.bars th{text-align:left;font-weight:600;width:3.2rem;padding:.2rem 0}.bars .n{width:3.5rem;text-align:right;
font-variant-numeric:tabular-nums}.bars tr:not(.here) th{font-weight:400;color:var(--soft)}
.bar{font-size:0;padding:.2rem 0}.bar i{display:inline-block;height:1.3rem;overflow:hidden;vertical-align:middle}
.bar span{font:normal .75rem/1.3rem system-ui;color:#fff;padding-left:.4em;text-shadow:0 0 2px #0007}
.k0{background:var(--k0)}.k1{background:var(--k1)}.k2{background:var(--k2)}.k3{background:var(--k3)}
i.float32{background:var(--float32)}i.float16{background:var(--float16)}i.bfloat16{background:var(--bfloat16)}
i.mixed{background:var(--mixed)}
.d{font-size:.85em;white-space:nowrap}.d.float32{color:var(--float32)}.d.float16{color:var(--float16)}
.d.bfloat16{color:var(--bfloat16)}
.tools{display:flex;flex-wrap:wrap;gap:.8rem;align-items:center}
.tools input[type=search]{flex:1 1 14rem;padding:.4rem .6rem;border:1px solid var(--line);border-radius:.4rem;
background:var(--card);color:inherit;font:inherit}
button{padding:.35rem .8rem;border:1px solid var(--line);border-radius:.4rem;background:var(--card);
color:inherit;font:inherit}
details{background:var(--card);border:1px solid var(--line);border-radius:.5rem;margin:.35rem 0}
summary{display:flex;flex-wrap:wrap;gap:.2rem 1rem;align-items:center;padding:.45rem .8rem;cursor:pointer;
list-style:none}
summary::-webkit-details-marker{display:none}
summary::before{content:"";border:solid var(--soft);border-width:0 2px 2px 0;width:.45em;height:.45em;rotate:-45deg}
details[open] summary::before{rotate:45deg}
.name{flex:1 1 12rem;overflow-wrap:anywhere;font-weight:600}.name small{font-weight:400;margin-left:.4em}
.share{flex:0 1 14rem;min-width:6rem;height:.6rem;display:flex;border-radius:3px;overflow:hidden;
background:var(--line)}
.badges{flex:0 0 auto;min-width:13rem;text-align:right}.badges em{font-style:normal;font-size:.8em;
color:var(--soft);margin-left:.8em}
.badges .bad{color:var(--bad);font-weight:600}
.scroll{overflow-x:auto}
.ops{font-size:.9em}.ops th{text-align:left;color:var(--soft);font-weight:500;font-size:.85em}
.ops th,.ops td{padding:.25rem .8rem;border-top:1px solid var(--line);vertical-align:top}
.ops td[data-l=times],.ops td[data-l=cast]{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
.ops td[data-l=operation]{white-space:nowrap}
.flagged{background:var(--badbg)}
body:not(.all) .quiet{display:none}[hidden]{display:none!important}
@media (max-width:44rem){.badges{flex:1 1 100%;text-align:left;min-width:0}.badges em{margin:0 .8em 0 0}
.share{flex:1 1 6rem}
.ops thead{display:none}.ops tr{display:grid;grid-template-columns:1fr 1fr;border-top:1px solid var(--line);
padding:.4rem .8rem}
.ops td{border:0;padding:.05rem 0}.ops td:empty{display:none}
.ops td[data-l=operation],.ops td[data-l=module],.ops td[data-l=why]{grid-column:1/-1}
.ops td[data-l=times],.ops td[data-l=cast]{text-align:left}
.ops td:not([data-l=operation]):not([data-l=why]):before{content:attr(data-l) " ";color:var(--soft);font-size:.85em}
body:not(.all) .ops .quiet{display:none}}
"""

SCRIPT: Final = """
const find=document.getElementById('find'),all=[...document.querySelectorAll('details')];
function filter(){const q=find.value.trim().toLowerCase();for(const d of all){const name=d.querySelector('.name')
.textContent.toLowerCase().includes(q);let any=false;for(const r of d.querySelectorAll('tbody tr')){
const hit=name||r.textContent.toLowerCase().includes(q);r.hidden=!hit;any=any||hit}d.hidden=!any}}
find.addEventListener('input',filter);
document.getElementById('views').addEventListener('change',e=>document.body.classList.toggle('all',e.target.checked));
document.getElementById('open').addEventListener('click',e=>{const open=!all.every(d=>d.hidden||d.open);
for(const d of all)d.open=open;e.target.textContent=open?'Close all':'Open all'});
"""
