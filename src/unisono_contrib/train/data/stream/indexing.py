"""A process that indexes shards: orders on stdin, answers on stdout, see `worker_pool`. No torch here."""

import json
import os
import sys

from unisono.spec.errors import UsageError
from unisono.train.data.worker_pool import failure
from unisono_contrib.train.data.stream.index import index_job


def main() -> None:
    """Serve until stdin ends."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # processes are the parallelism, one a core
    answers, sys.stdout = sys.stdout, sys.stderr  # what a library prints is no answer
    for line in sys.stdin:
        try:
            answer = index_job(json.loads(line))
        except (UsageError, OSError) as error:
            answer = failure(error)
        print(json.dumps(answer), file=answers, flush=True)
