"""Names of TensorRT's Python API that our sources use, found by reading them; run as a program it checks a module.

``python binding_names.py MODULE [STUB_LIBRARY…]`` loads the stub libraries, imports MODULE and prints missing names.
"""

from __future__ import annotations

import ast
import ctypes
import importlib
import sys
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "trtllm_dflash"
SOURCES = sorted([*PACKAGE.glob("ops/tensorrt_*.py"), *PACKAGE.glob("engine/tensorrt_*.py")])
# Variables of these names hold objects of these classes, in the files that build and run.
OBJECTS = {
    "ops": {
        "network": "INetworkDefinition",
        "_registry": "IPluginRegistry",
        "registry": "IPluginRegistry",
        "creator": "IPluginCreatorV3One",
    },
    "tensorrt_compile": {
        "builder": "Builder",
        "config": "IBuilderConfig",
        "shapes": "IOptimizationProfile",
        "cache": "ITimingCache",
        "network": "INetworkDefinition",
    },
    "tensorrt_emission": {"builder": "Builder", "network": "INetworkDefinition"},
    "PlanRunner": {"context": "IExecutionContext", "engine": "ICudaEngine", "_runtime": "Runtime"},
}
STRING_ENUMS = {
    "elementwise": "ElementWiseOperation",
    "unary": "UnaryOperation",
    "activation": "ActivationType",
    "reduce": "ReduceOperation",
}
ATTRIBUTES = (
    *(f"IShuffleLayer.{name}" for name in ("first_transpose", "reshape_dims", "second_transpose")),
    *(f"IGatherLayer.{name}" for name in ("axis", "num_elementwise_dims")),
    *(f"IAttention.{name}" for name in ("mask", "key_value_lengths", "decomposable", "get_output", "name")),
    *(f"ILayer.{name}" for name in ("name", "metadata", "set_input", "get_output", "type")),
    *(f"ITensor.{name}" for name in ("name", "dtype", "shape")),
    "ISliceLayer.mode",
    "IConcatenationLayer.axis",
    "ISoftMaxLayer.axes",
    "IDequantizeLayer.axis",
    "IDistCollectiveLayer.num_ranks",
)
ONLY_RTX = (
    "ComputeCapability",
    "ComputeCapability.__members__",
    "IBuilderConfig.num_compute_capabilities",
    "IBuilderConfig.set_compute_capability",
)
ONLY_FULL = ("INetworkDefinition.add_plugin_v3",)


def used_names() -> set[str]:
    """Dotted names below the TensorRT module."""
    names = set(ATTRIBUTES)
    for file in SOURCES:
        tree = ast.parse(file.read_text(encoding="utf-8"))
        objects = OBJECTS["ops"] if file.parent.name == "ops" else OBJECTS.get(file.stem, {})
        _collect(tree, objects, names)
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and node.name in OBJECTS:
                _collect(node, OBJECTS[node.name], names)
    return names


def _collect(tree: ast.AST, objects: dict[str, str], names: set[str]) -> None:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            chain = _chain(node)
            for at, part in enumerate(chain[:-1]):
                if part == "trt":
                    names.add(".".join(chain[at + 1 : at + 3]))
                elif part in objects and at == len(chain) - 2:
                    names.add(f"{objects[part]}.{chain[-1]}")
        is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if is_call and node.func.attr in STRING_ENUMS and node.args and isinstance(node.args[0], ast.Constant):  # type: ignore[attr-defined]
            names.add(f"{STRING_ENUMS[node.func.attr]}.{node.args[0].value}")  # type: ignore[attr-defined]


def _chain(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Attribute):
        return [*_chain(node.value), node.attr]
    return [node.id] if isinstance(node, ast.Name) else ["?"]


def missing_names(module: object) -> list[str]:
    """Used names that ``module`` does not have."""
    missing = []
    for name in sorted(used_names()):
        found: object = module
        for part in name.split("."):
            if not hasattr(found, part):
                missing.append(name)
                break
            found = getattr(found, part)
    return missing


if __name__ == "__main__":
    for library in sys.argv[2:]:
        ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
    print("\n".join(missing_names(importlib.import_module(sys.argv[1]))))
