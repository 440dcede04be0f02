"""What a script does that was only ever run on a GPU."""

import sys

import torch
from apex import amp


def nccl():
    torch.distributed.init_process_group("nccl", store=torch.distributed.HashStore(), rank=0, world_size=1)


STATEMENTS = {
    "cuda": lambda: torch.nn.Linear(2, 2).cuda(),
    "set_device": lambda: torch.cuda.set_device(0),
    "device": lambda: torch.ones(2, device="cuda"),
    "tensor": lambda: torch.cuda.FloatTensor([1.0]),
    "event": lambda: torch.cuda.Event().record(),
    "synchronize": lambda: torch.cuda.synchronize(),
    "current_device": lambda: torch.cuda.current_device(),
    "nccl": nccl,
    "own_fault": lambda: {}["missing"],
}

if len(sys.argv) > 2:
    # All of them, to see that each is recognised: by the runner itself, which a script would not reach for.
    from mpinit.compat.running import _is_for_want_of_a_device

    for name, statement in STATEMENTS.items():
        try:
            statement()
        except Exception as error:
            print(name, _is_for_want_of_a_device(error), error)
        else:
            print(name, "nothing raised")
    sys.exit()

model = torch.nn.Linear(2, 2)
STATEMENTS[sys.argv[1]]()
amp.initialize(model)
