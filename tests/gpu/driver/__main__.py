"""Builds the runtime in a folder: `python -m tests.gpu.driver FOLDER`."""

import subprocess
import sys
import zipfile
from importlib.metadata import version
from pathlib import Path

CUDA = "13.0.*"
OTHERS = ("libcublas.so.13", "libcublasLt.so.13", "libcuda.so.1", "libcurand.so.10")  # libraries whose functions are written here
CREATING = ("Create_v2", "LtCreate", "DescCreate", "PreferenceCreate", "LayoutCreate")


def main(folder: Path) -> None:
    library = folder / "lib"
    library.mkdir(parents=True, exist_ok=True)
    download(folder / "site", f"onnxruntime-gpu=={version('onnxruntime')}")
    download(folder / "headers", f"nvidia-cuda-runtime=={CUDA}", f"nvidia-cuda-crt=={CUDA}")
    include = next((folder / "headers").rglob("cuda_runtime_api.h")).parent
    compile_library(library / "libcudart.so.13", Path(__file__).with_name("cuda.c"), "-I", str(include))
    provider = folder / "site/onnxruntime/capi/libonnxruntime_providers_cuda.so"
    symbols = subprocess.run(["nm", "-D", "--undefined-only", provider], check=True, capture_output=True, text=True).stdout.split()
    for name in OTHERS:
        called = [symbol.removesuffix(f"@{name}") for symbol in symbols if symbol.endswith(f"@{name}")]
        called += ["cuTensorMapEncodeTiled"] if name == "libcuda.so.1" else []
        source = library / f"{name}.c"
        source.write_text("#include <stdlib.h>\n#include <string.h>\nvoid stub_launch(void);\n" + "".join(map(function, called)))
        compile_library(library / name, source, "-L", str(library), "-l:libcudart.so.13")


def download(target: Path, *packages: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", target, *packages], check=True)
    for wheel in target.glob("*.whl"):
        zipfile.ZipFile(wheel).extractall(target)
        wheel.unlink()


def compile_library(target: Path, source: Path, *more: str) -> None:
    """The functions have the library's name as their version, as NVIDIA's have."""
    exported = target.with_suffix(".map")
    exported.write_text(f"{target.name} {{ global: *; }};")
    linked = [f"-Wl,--version-script={exported}", f"-Wl,-soname,{target.name}"]
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-w", str(source), "-o", str(target), *linked, *more], check=True)


def function(name: str) -> str:
    """A function of cuBLAS: products are launches, what creates something returns memory, and everything succeeds."""
    if name.endswith(CREATING):
        return f"int {name}(void **handle) {{ *handle = malloc(64); return 0; }}\n"
    if "GetStatus" in name:
        return f'const char *{name}(int status) {{ return "an error of the stub"; }}\n'
    if name.endswith("GetHeuristic"):  # the last two arguments are the algorithms and their number
        arguments = "void *a, void *b, void *c, void *d, void *e, void *f, void *g, int n, char *found, int *size"
        return f"int {name}({arguments}) {{ memset(found, 0, 96); *size = 1; return 0; }}\n"
    if name.endswith("GetMathMode"):
        return f"int {name}(void *handle, int *mode) {{ *mode = 0; return 0; }}\n"
    product = name.endswith(("Matmul", "Transform")) or "emm" in name or "geam" in name
    return f"int {name}() {{ {'stub_launch(); ' * product}return 0; }}\n"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
