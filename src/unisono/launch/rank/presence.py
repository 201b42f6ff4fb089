"""A rank's answers to who asks from outside, where no supervisor of ours could give them: a thread beside its watchdog.

It takes no part in what ranks agree on, so it answers whatever these do. Where a rank of this host cannot answer (it is
stopped, or C code holds its Python up) and somebody asks from another host, a neighbour looks at it and says so.
"""

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from unisono.launch import inspect_folder
from unisono.launch.inspect_folder import InspectQuestion, Questions, RankProcess
from unisono.launch.inspect_schema import RankReport


class Presence:
    """This rank's place in a folder, until `close`. report: what it says of itself when asked. Raises OSError where the
    folder cannot be written."""

    def __init__(self, folder: Path, me: RankProcess, report: Callable[[], RankReport]) -> None:
        self._folder, self._me, self._report = folder, me, report
        self._over = threading.Event()
        inspect_folder.appear(folder, me)
        rest = 1.0 if me.private else min(10.0, max(1.0, me.world / 500))  # one folder bears them all
        self._questions = Questions(folder, rest)
        self._thread = threading.Thread(target=self._listen, name="unisono-alive", daemon=True)
        self._thread.start()

    def leave(self) -> None:
        """Be seen no more."""
        self._over.set()
        inspect_folder.leave(self._folder, self._me)

    def close(self) -> None:
        """Leave; returns when the thread has ended."""
        self.leave()
        if self._thread is not threading.current_thread():
            self._thread.join(5.0)

    def _listen(self) -> None:
        while not self._over.wait(self._questions.wait()):
            if (news := self._questions.look()) is None:
                continue
            question, again = news
            if not again:
                self._answer(question, self._me.rank, self._report)
            elif question.home != self._me.home:
                self._speak_for_others(question)

    def _answer(self, question: InspectQuestion, rank: int, report: Callable[[], RankReport]) -> None:
        try:
            facts = asdict(report())
        except Exception as error:  # whatever it is, the run goes on, and who asks hears why
            facts = {"failed": f"{type(error).__name__}: {error}"}
        with suppress(OSError):
            if not self._over.is_set():
                inspect_folder.answer(self._folder, rank, question.token, facts)

    def _speak_for_others(self, question: InspectQuestion) -> None:
        """Look at the ranks of this host that have not answered, if this is the first rank of those that have."""
        here = [living for living in inspect_folder.living(self._folder) if living.home == self._me.home]
        silent = [
            living
            for living in here
            if inspect_folder.answer_of(self._folder, living.rank, question.token) is None
        ]
        first = min(living.rank for living in here if living not in silent) if len(silent) < len(here) else -1
        for living in silent if first == self._me.rank else ():
            self._answer(question, living.rank, lambda living=living: inspect_folder.seen(living))
