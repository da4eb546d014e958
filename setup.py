"""Install the top-level folders as one import package: export/x.py is export_grok.export.x."""

from setuptools import find_packages, setup

FOLDERS = ("export", "plugins", "engines", "runtime")

setup(
    packages=["export_grok", "export_grok.commands"]
    + [
        f"export_grok.{package}"
        for folder in FOLDERS
        for package in find_packages(include=[folder, f"{folder}.*"])
    ],
    package_dir={f"export_grok.{folder}": folder for folder in FOLDERS},
)
