"""A script whose workers are started afresh, import it again, and apex with it."""

import multiprocessing
import sys

import apex
from apex import amp


def work(queue):
    queue.put((apex.__version__, callable(amp.initialize), __name__))


if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    process = context.Process(target=work, args=(queue,))
    process.start()
    version, there, name = queue.get()
    process.join()
    assert (version, there, name, process.exitcode) == (apex.__version__, True, "__mp_main__", 0)
    print("passed", sys.argv)
