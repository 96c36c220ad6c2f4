"""Test how the number of ranks follows from the settings and the launcher's environment."""

import pytest

from keel.config.trainer import TrainerSettings
from keel.errors import ConfigError
from keel.training.distributed.rank_processes import RankProcesses
from keel.training.distributed.world import RankInfo


def test_the_launcher_and_the_settings_must_agree() -> None:
    environment = {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    rank_info = RankInfo.from_environment(environment)
    assert rank_info is not None and RankProcesses(TrainerSettings(), rank_info).size == 4
    with pytest.raises(ConfigError, match=r"trainer\.ranks = 2, but the launcher started 4"):
        RankProcesses(TrainerSettings(ranks=2), rank_info)
    with pytest.raises(ConfigError, match="RANK = 4 must be from 0 to WORLD_SIZE - 1 = 3"):
        RankInfo.from_environment({**environment, "RANK": "4"})
