"""Build the package as it is released, and use it as a user does who has no copy of the repository.

``python .ci/package.py FOLDER`` builds the wheel and the source archive into FOLDER/dist, checks their metadata and
contents, puts the wheel alone into FOLDER/site, and from there runs the README's tour, ``mpinit --version``, ``mpinit
audit`` and mypy on a user's script. torch and pydantic are those of the environment that runs this.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
EXPECTED = (
    "pyproject.toml",
    "README.md",
    "LICENSE",
    "CHANGELOG.md",
    "docs/index.md",
    "tests/conftest.py",
    "configs/o2.toml",
)


def run(*command: str | Path, cwd: Path = ROOT, **environment: str) -> str:
    """The command's output; its failure ends this program."""
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=os.environ | environment, capture_output=True, text=True
    )
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def build(folder: Path) -> tuple[Path, Path]:
    """(wheel, source archive), their metadata checked."""
    dist = folder / "dist"
    run(sys.executable, "-m", "build", "--outdir", dist, ROOT)
    (wheel,), (source,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    run(sys.executable, "-m", "twine", "check", "--strict", wheel, source)
    check_description(wheel)
    return wheel, source


def check_description(wheel: Path) -> None:
    """What an index shows of the package is all of README, and no link in it is relative."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        text = archive.read(name).decode()
    if "## The 60-second tour" not in text:
        sys.exit(f"{wheel.name} has no long description")
    relative = re.findall(r"\]\((?!https?://|#)[^)\s]+\)", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S))
    if relative:
        sys.exit(f"{wheel.name}: its long description has relative links: {relative[:3]}")


def check_contents(wheel: Path, source: Path) -> None:
    """The source archive holds tests and docs, the wheel the package, its marker of types, its C++ and nothing else."""
    with tarfile.open(source) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    missing = [name for name in EXPECTED if name not in names]
    if missing:
        sys.exit(f"{source.name} lacks {', '.join(missing)}")
    with zipfile.ZipFile(wheel) as archive:
        tops = {name.partition("/")[0] for name in archive.namelist()}
        lacks = {"mpinit/py.typed"} - set(archive.namelist())
    if lacks or not all(top == "mpinit" or top.endswith(".dist-info") for top in tops):
        sys.exit(f"{wheel.name} holds {sorted(tops)}; it lacks {sorted(lacks)}")


def tour() -> str:
    """Return the blocks of README's tour, one after another, as a script."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    text = text.partition("## The 60-second tour")[2].partition("## Levels")[0]
    return "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))


def use(wheel: Path, folder: Path) -> None:
    """Install the wheel alone, and run what a user runs."""
    site, away = folder / "site", folder / "away"
    away.mkdir()
    run(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", site, wheel)
    packages = next(Path(path) for path in sys.path if path.endswith("site-packages"))
    # The interpreter below this environment reads no .pth file of it, so an editable install is out of sight.
    python, path = Path(sys.executable).resolve(), f"{site}{os.pathsep}{packages}"
    script = away / "tour.py"
    script.write_text(tour() + "\nprint(mpinit.__file__)\n", encoding="utf-8")
    where = run(python, script, cwd=away, PYTHONPATH=path).splitlines()[-1]
    if not Path(where).is_relative_to(site):
        sys.exit(f"the tour ran with {where}, not with the wheel")
    version = run(python, "-m", "mpinit", "--version", cwd=away, PYTHONPATH=path).strip()
    if version != f"mpinit {wheel.name.split('-')[1]}":
        sys.exit(f"mpinit --version says {version!r}, the wheel is {wheel.name}")
    (away / "net.py").write_text(NET, encoding="utf-8")
    audited = run(python, "-m", "mpinit", "audit", "net:parts", cwd=away, PYTHONPATH=f"{away}{os.pathsep}{path}")
    if "bytes per parameter" not in audited:
        sys.exit(f"mpinit audit says {audited!r}")
    typed = away / "typed.py"
    typed.write_text(TYPED, encoding="utf-8")
    run(sys.executable, "-m", "mypy", "--strict", "--cache-dir", away / "cache", typed, cwd=away, MYPYPATH=str(site))
    print(f"{version}: built, checked, and its tour run from {site}")


NET = """\
import torch


def parts():
    model = torch.nn.Linear(64, 64, dtype=torch.bfloat16)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-5)
"""

TYPED = """\
import torch
import mpinit

model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
mpinit.initialize(model, optimizer, opt_level="O2")
with mpinit.scale_loss(model(torch.ones(1, 2)).sum(), optimizer) as scaled_loss:
    scaled_loss.backward()
scale: float | list[float] = mpinit.loss_scale(optimizer)
"""


def main(folder: Path) -> None:
    """All of it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    wheel, source = build(folder)
    check_contents(wheel, source)
    use(wheel, folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
