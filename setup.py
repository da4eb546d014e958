"""Install the top-level folders as one import package: export/x.py is export_grok.export.x.

The CPU kernels are compiled where there is a compiler; without one everything else is installed.
"""

import platform
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

FOLDERS = ("export", "plugins", "engines", "runtime")

X86 = platform.machine().lower() in ("x86_64", "amd64")
AVX512 = "-mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx2 -mfma -mprefer-vector-width=512"
# One library holds a variant for each instruction set, and takes the best one that the CPU has.
VARIANTS = {
    "base": "",
    **(
        {"avx2": "-mavx2 -mfma", "avx512": AVX512, "vnni": f"{AVX512} -mavx512vnni"} if X86 else {}
    ),
}
SOURCES = [
    "plugins/native/library.cpp",
    *(f"plugins/native/variant_{name}.cpp" for name in VARIANTS),
    *sorted(str(path) for path in Path("plugins").glob("*/ort_kernel.cpp")),
]
FLAGS = ["-std=c++17", "-O3", "-g0", "-fvisibility=hidden", "-Wall", "-Wextra", "-Iplugins/native"]


class BuildKernels(build_ext):
    """Compile each variant for its instruction set; everything else for any CPU."""

    def get_ext_filename(self, fullname: str) -> str:
        """Return the library's name, which with its dot is none of a Python module."""
        return f"{fullname.replace('.', '/')}.native.so"

    def build_extension(self, ext: Extension) -> None:
        """Compile and link the library; one of an earlier run goes, whether that works or not."""
        target = Path(self.get_ext_fullpath(ext.name))
        for old in (target, *([Path("plugins", target.name)] if self.editable_mode else [])):
            old.unlink(missing_ok=True)
        objects = []
        for source in ext.sources:
            name = Path(source).stem.removeprefix("variant_")
            flags = [*ext.extra_compile_args, *VARIANTS.get(name, "").split()]
            objects += self.compiler.compile(
                [source], output_dir=self.build_temp, extra_postargs=flags, depends=ext.depends
            )
        self.compiler.link_shared_object(objects, str(target), libraries=["m"], target_lang="c++")


setup(
    packages=["export_grok", "export_grok.commands"]
    + [
        f"export_grok.{package}"
        for folder in FOLDERS
        for package in find_packages(include=[folder, f"{folder}.*"])
    ],
    package_dir={f"export_grok.{folder}": folder for folder in FOLDERS},
    ext_modules=[
        Extension(
            "export_grok.plugins.ort_kernels",
            SOURCES,
            depends=sorted(str(path) for path in Path("plugins/native").glob("*.h")),
            extra_compile_args=FLAGS,
            language="c++",
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildKernels},
)
