"""The one logger, silent on every rank but the first."""

import logging

import torch


def _speaks(record: logging.LogRecord) -> bool:
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return not distributed or torch.distributed.get_rank() == 0


log = logging.getLogger("mpinit")
log.addFilter(_speaks)
