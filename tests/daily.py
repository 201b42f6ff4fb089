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
    "launch/test_recovery.py::test_a_lost_rank_changes_no_bit": 2,
    "parallel/test_channels.py::test_dealt_channels_equal_one_device": 2,
    "parallel/test_experts.py::test_every_way_to_deal_experts_is_one_device": 2,
    "parallel/test_grid.py::test_a_grid_equals_one_device": 2,
    "parallel/test_meta.py::test_nothing_strays_and_nobody_waits_but_where_it_is_said": 2,
    "parallel/test_meta.py::test_the_members_of_a_group_meet_under_one_name": 2,
    "planner/test_one_count.py::test_what_is_priced_is_what_is_sent": 3,
    "planner/test_timeline.py::test_the_runtime_keeps_to_the_simulated_timeline": 3,
    "train/state/test_saving.py::test_a_failed_save_is_told_and_the_run_goes_on": 2,
    "train/test_carries.py::test_beside_other_axes_too": 2,
    "train/test_carries.py::test_every_flush_timetable_is_one_device_to_the_bit": 3,
    "train/test_carries.py::test_two_copies_are_one_device_to_rounding_and_to_the_bit_in_canonical_mode": 3,
    "train/test_offload.py::test_the_same_bits_as_without": 3,
    "train/test_recompute.py::test_the_same_bits_as_without": 3,
    "verbs/test_auto.py::test_the_choice_is_priced_no_higher_than_the_recipes_own_plan_and_trains_default": 2,
    "verbs/test_bad_runs.py::test_answered": 2,
    "verbs/test_lost_pieces.py::test_what_one_rank_alone_held_comes_back": 2,
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
