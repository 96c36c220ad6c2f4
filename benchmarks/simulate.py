"""How long `keel simulate` takes as clusters grow, and that what it predicts does not depend on their size.

Engines, batch and work under way grow together, so that every case is the same run at another scale: 4 rollouts of a
batch for each engine, and a trainer that is as fast as they are. Exits 1 when 2,000 engines and 50 steps take more than
30 seconds of processor time, or when the predicted speed of a step differs by more than a tenth between the scales.

    python benchmarks/simulate.py            # about a minute
    python benchmarks/simulate.py --quick    # without the largest
"""

import argparse
import os
import sys
import time

# the repository in place of this folder, whose signal.py is not the standard library's
sys.path.insert(0, os.path.dirname(os.path.abspath(sys.path.pop(0))))

from benchmarks.measure import verdict
from keel.config import RunSettings
from keel.config.simulate import SimulateSettings
from keel.tools.simulate.prediction import Prediction, predict

STEPS = 50
BAR = 30.0
"""Seconds for 2,000 engines."""
ALIKE = 0.1


def case(engines: int) -> Prediction:
    rollouts = 4 * engines
    settings = RunSettings.model_validate(
        {
            "sampling": {"max_tokens": 2048},
            "engine": {"kind": "pool"},
            "pool": {"dns": "samplers.example.internal:8000"},
            "scheduler": {
                "groups_per_step": rollouts // 8,
                "group_size": 8,
                "max_in_flight": 4 * rollouts,
                "max_off_policy_steps": 2,
            },
        }
    )
    assumed = SimulateSettings.model_validate(
        {
            "steps": STEPS,
            "engines": engines,
            "length": "lognormal:600:0.8",
            "rollout_failures": 0.02,
            "engine_crash_hours": 24.0,
            "trainer_tokens_per_second": rollouts * 600 / 30,
        }
    )
    return predict(settings, assumed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="without the largest cluster")
    sizes = [20, 200] if parser.parse_args().quick else [20, 200, 2000]
    print(f"{STEPS} steps, 4 rollouts of a batch for each engine, up to 2 versions old, 2 % failures")
    print("engines  rollouts  seconds  µs a rollout  s/step predicted  staleness  refused")
    held, predicted = True, []
    for engines in sizes:
        began = time.process_time()
        found = case(engines)
        seconds = time.process_time() - began
        predicted.append(found.step_seconds)
        print(
            f"{engines:7,}  {found.rollouts:8,}  {seconds:7.1f}  {seconds / found.rollouts * 1e6:12.0f}"
            f"  {found.step_seconds:16.1f}  {found.staleness:9.2f}  {found.dropped_share:6.1%}"
        )
        if engines == 2000:
            held &= seconds <= BAR
            print(f"2,000 engines take {seconds:.1f} s   {verdict(seconds <= BAR)}: at most {BAR:g}")
    alike = max(predicted) / min(predicted) - 1 <= ALIKE
    print(f"a step is as fast at every scale to {ALIKE:.0%}   {verdict(alike)}")
    return 0 if held and alike else 1


if __name__ == "__main__":
    sys.exit(main())
