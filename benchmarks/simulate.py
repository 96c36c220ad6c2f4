"""Duration of `keel simulate` for growing clusters, and consistency of its predictions across scales.

Engines, batch size and rollouts in flight grow together, so that every case is the same run at another scale: 4
rollouts of a batch per engine, and a trainer of matching speed. Exits with 1 if 2,000 engines and 50 steps take more
than 30 seconds of processor time, or if the predicted step time differs by more than a tenth between scales.

    python benchmarks/simulate.py            # about a minute
    python benchmarks/simulate.py --quick    # without the largest cluster
"""

import argparse
import os
import sys
import time

# replace this folder, whose signal.py would shadow the standard library's, by the repository
sys.path.insert(0, os.path.dirname(os.path.abspath(sys.path.pop(0))))

from benchmarks.measure import verdict
from keel.config import RunSettings
from keel.config.simulate import SimulateSettings
from keel.tools.simulate.prediction import Prediction, predict

STEPS = 50
TIME_THRESHOLD = 30.0
"""Most seconds for 2,000 engines."""
TOLERANCE = 0.1
"""Most relative difference of the predicted step times."""


def predict_cluster(engines: int) -> Prediction:
    """Predict a run with this many engines."""
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
    print("engines  rollouts  seconds  µs a rollout  s/step predicted  staleness  dropped")
    passed, step_times = True, []
    for engines in sizes:
        start = time.process_time()
        prediction = predict_cluster(engines)
        seconds = time.process_time() - start
        step_times.append(prediction.step_seconds)
        print(
            f"{engines:7,}  {prediction.rollouts:8,}  {seconds:7.1f}  {seconds / prediction.rollouts * 1e6:12.0f}"
            f"  {prediction.step_seconds:16.1f}  {prediction.staleness:9.2f}  {prediction.dropped_share:6.1%}"
        )
        if engines == 2000:
            passed &= seconds <= TIME_THRESHOLD
            print(
                f"2,000 engines take {seconds:.1f} s   {verdict(seconds <= TIME_THRESHOLD)}: at most {TIME_THRESHOLD:g}"
            )
    consistent = max(step_times) / min(step_times) - 1 <= TOLERANCE
    print(f"predicted step times agree to {TOLERANCE:.0%} at every scale   {verdict(consistent)}")
    return 0 if passed and consistent else 1


if __name__ == "__main__":
    sys.exit(main())
