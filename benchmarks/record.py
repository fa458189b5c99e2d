"""Writes the records in results/bench.

    python benchmarks/record.py cpu|engine|h200|portable|scaling FOLDER [MODEL]

cpu, portable: two threads on an otherwise idle CPU; portable is the same without the native kernels. h200:
one NVIDIA H200, TF32, channels last.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

if sys.argv[1] == "portable":
    os.environ["RECTGRAD_KERNELS"] = "portable"

from rectgrad.bench import Plan, run

CPU = {"device": "cpu", "threads": 2}
H200 = {"device": "cuda", "channels_last": True, "tf32": True}
LARGE = ("vgg16", "resnet50", "inception_v4")
PLAIN = ("rectgrad", "saliency", "guided_backprop")
PLANS = {
    "cpu": {
        "cpu-batch1": Plan(("efficientnet_lite0",), rounds=15, selection=True, **CPU),
        "cpu-batch4": Plan(
            LARGE, batch=4, methods=("rectgrad", "saliency", "guided_backprop"), naive=False, rounds=9, **CPU
        ),
        "cpu-averages": Plan(
            ("efficientnet_lite0",), methods=("smoothgrad", "integrated_gradients"), averages=True, **CPU
        ),
    },
    "engine": {  # the engine alone, without other implementations
        "cpu-engine-batch1": Plan(
            ("efficientnet_lite0",), methods=PLAIN, captum=False, naive=False, rounds=21, **CPU
        ),
        "cpu-engine-batch4": Plan(
            LARGE, batch=4, methods=("rectgrad",), captum=False, naive=False, rounds=9, **CPU
        ),
        "cpu-engine-resnet50-batch1": Plan(
            ("resnet50",), methods=(*PLAIN, "epsilon_lrp", "deeplift"), naive=False, rounds=11, **CPU
        ),
    },
    "portable": {
        "cpu-portable-batch4": Plan(
            ("vgg16", "resnet50"), batch=4, methods=("rectgrad",), captum=False, naive=False, rounds=15, **CPU
        ),
    },
    "scaling": {
        "cpu-scaling": Plan(
            ("resnet50",), methods=("rectgrad",), captum=False, naive=False, rounds=5, scaling=True, **CPU
        ),
    },
    "h200": {
        "h200-batch64": Plan(("resnet50", "inception_v4", "vgg16", "vit_b_16"), batch=64, rounds=9, **H200),
        "h200-batch1": Plan(("resnet50", "inception_v4", "efficientnet_lite0"), rounds=9, **H200),
        "h200-scaling": Plan(
            ("resnet50",), methods=("rectgrad",), captum=False, naive=False, rounds=5, scaling=True, **H200
        ),
    },
}


def say(kind: str, section: dict) -> None:
    for row in section.get("rows", []):
        print(section.get("model"), row.get("name"), row.get("ratio"), flush=True)


if __name__ == "__main__":
    folder, models = Path(sys.argv[2]), tuple(sys.argv[3:])
    for name, plan in PLANS[sys.argv[1]].items():
        run(
            plan if not models else Plan(**{**vars(plan), "models": models}),
            folder / f"{name}.json",
            show=say,
        )
