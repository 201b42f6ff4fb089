"""A process that indexes shards: orders on stdin, answers on stdout, see `worker_pool`. No torch here."""

import json
import os
import sys

from unisono.spec.errors import UsageError
from unisono_contrib.train.data.stream.index import index_job


def main() -> None:
    """Serve until stdin ends."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # processes are the parallelism, one a core
    answers, sys.stdout = sys.stdout, sys.stderr  # what a library prints is no answer
    for line in sys.stdin:
        try:
            answer = index_job(json.loads(line))
        except UsageError as error:
            answer = {"error": {k: getattr(error, k) for k in ("what", "where", "likely", "fix", "code")}}
        except OSError as error:
            answer = {"errno": error.errno, "error": str(error), "file": str(error.filename or "")}
        print(json.dumps(answer), file=answers, flush=True)
