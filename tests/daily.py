"""Long families of cases by the day: `make test` has a part of each every day, `make test-all` has them all.

TESTS_DAY=739946 in the environment chooses the day, to see again what a run of that day saw.
"""

import os
from collections import Counter
from collections.abc import Iterable
from datetime import date

import pytest

# Set in the process that starts the workers, which inherit it: they collect the same cases at midnight, too.
DAY = int(os.environ.setdefault("TESTS_DAY", str(date.today().toordinal())))

# Family: one case in so many has its turn each day. None is here that is asked for a planted bug
# (tests/verify/planted): those run every day.
FAMILIES = {
    "launch/test_doctor_hang.py::test_the_culprit_of_a_hang_is_named_from_outside": 2,
    "launch/test_guardian.py::test_what_asks_for_the_end_reaches_the_supervisor_once": 3,
    "launch/test_guardian.py::test_who_is_killed_is_replaced_and_no_bit_is_another": 2,
    "launch/test_hangs.py::test_the_culprit_is_named_and_nobody_stays_or_nothing_is_wrong": 2,
    "launch/test_machine.py::test_whatever_happens_a_run_ends_or_goes_on": 2,
    "launch/test_recovery.py::test_a_lost_rank_changes_no_bit": 2,
    "planner/test_one_count.py::test_what_is_priced_is_what_is_sent": 3,
    "planner/test_timeline.py::test_the_runtime_keeps_to_the_simulated_timeline": 3,
    "verbs/test_auto.py::test_the_choice_is_priced_no_higher_than_the_recipes_own_plan_and_trains_default": 2,
    "verbs/test_bad_runs.py::test_answered": 2,
}


def is_today(number: int, of: int) -> bool:
    """Whether case `number` of a family has its turn today, where one in `of` has."""
    return number % of == DAY % of


def put_off(items: Iterable[pytest.Item]) -> None:
    """Mark as slow the cases of FAMILIES that have their turn on another day."""
    counts = Counter[str]()
    for item in items:
        family = item.nodeid.removeprefix("tests/").partition("[")[0]
        if family in FAMILIES and not item.get_closest_marker("slow"):
            if not is_today(counts[family], FAMILIES[family]):
                item.add_marker(pytest.mark.slow)
            counts[family] += 1
