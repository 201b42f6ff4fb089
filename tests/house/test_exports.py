"""The public names are a list that changes on purpose only."""

import unisono

EXPORTED = {
    "DataConfig",
    "Job",
    "LaunchConfig",
    "ModelConfig",
    "OutConfig",
    "Plan",
    "Recipe",
    "TrainConfig",
    "TrainingStep",
    "UnisonoError",
    "__version__",
    "check_gradients",
    "check_stack",
    "check_updates",
    "from_dtensor_state_dict",
    "gradients_of",
    "init",
    "notebook_launch",
    "prove",
    "scope",
    "to_dtensor_state_dict",
    "trainer",
}


def test_exported_names_are_these() -> None:
    assert set(getattr(unisono, "__all__", ["__version__"])) == EXPORTED


def test_every_exported_name_is_there() -> None:
    for name in EXPORTED:
        assert getattr(unisono, name) is not None
