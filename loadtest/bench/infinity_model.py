"""Writes a checkpoint in the layout that infinity reads: a folder with the checkpoint's files and one model.onnx at its root.

Runs in infinity's environment, where attnserve is not installed:

    PYTHON_OF_INFINITY infinity_model.py CHECKPOINT OUT

The graph is exported, and then its operators are fused by optimum's optimizer with the settings that infinity uses. infinity itself would
fuse them when it starts, but the optimum releases that work with torch 2.13 reject a keyword that infinity 0.0.78 passes, so infinity would
warn and serve the graph without fusion. With the fused graph, infinity is as fast as it can be.
"""

import shutil
import sys
import tempfile
from pathlib import Path

import torch
from optimum.exporters.onnx import main_export
from optimum.onnxruntime import ORTModelForFeatureExtraction, ORTOptimizer
from optimum.onnxruntime.configuration import OptimizationConfig


def main(checkpoint: Path, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        plain, fused = Path(temporary, "plain"), Path(temporary, "fused")
        main_export(str(checkpoint), plain, task="feature-extraction")
        optimizer = ORTOptimizer.from_pretrained(ORTModelForFeatureExtraction.from_pretrained(plain))
        optimizer.optimize(
            OptimizationConfig(optimization_level=99, optimize_for_gpu=False, fp16=False), save_dir=fused, one_external_file=True
        )
        for file in checkpoint.iterdir():
            if file.suffix in (".json", ".txt"):
                shutil.copy(file, out)
        shutil.copy(fused / "model_optimized.onnx", out / "model.onnx")
    print(f"{out / 'model.onnx'}, by torch {torch.__version__}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
