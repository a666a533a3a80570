"""Known vulnerabilities of what setup.cfg asks for (not of what that asks for in turn), at the versions that are installed here.

    make audit          installs pip-audit in an environment of its own and runs this

Exit status 0: every package was looked up and none has a known vulnerability; 1: some have; 2: some could not be looked up (no network, or an
index without advisories), which is no answer.
"""

from __future__ import annotations

import argparse
import configparser
import json
import re
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def asked_for(text: str) -> dict[str, list[str]]:
    """{extra: names} of a setup.cfg; "" is what is always installed."""
    config = configparser.ConfigParser()
    config.read_string(text)
    words = {"": config["options"]["install_requires"], **config["options.extras_require"]}
    return {extra: [re.split(r"[<>=!~ \[;]", line.strip())[0] for line in lines.splitlines() if line.strip()] for extra, lines in words.items()}


def installed(names: list[str]) -> tuple[list[str], list[str]]:
    """(name==version of what is there, names of what is not)."""
    here, missing = [], []
    for name in sorted(set(names)):
        try:
            here.append(f"{name}=={metadata.version(name).split('+')[0]}")
        except metadata.PackageNotFoundError:
            missing.append(name)
    return here, missing


def verdict(report: dict[str, Any] | None) -> tuple[int, list[str]]:
    """(exit status, lines) of pip-audit's JSON; None where there is none."""
    if report is None:
        return 2, ["pip-audit gave no answer: is there a network? Nothing was audited."]
    lines, skipped, bad = [], [], False
    for package in report["dependencies"]:
        if "skip_reason" in package:
            skipped.append(package["name"])
        for found in package.get("vulns", ()):
            bad = True
            lines.append(f"{package['name']} {package['version']}: {found['id']}, mended in {', '.join(found['fix_versions']) or 'no version'}")
    looked_up = len(report["dependencies"]) - len(skipped)
    if looked_up:
        lines.append(f"{looked_up} of {len(report['dependencies'])} packages looked up, {'see above' if bad else 'no known vulnerability'}")
    if skipped:
        lines.append(
            f"not looked up, so not audited: {', '.join(skipped)}. The index that pip is set to has no advisories for them; run this where PyPI is reached."
        )
    return (1 if bad else 2 if skipped or not looked_up else 0), lines


def main() -> int:
    p = argparse.ArgumentParser(prog="python -m tests.audit", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("pip_audit", help="the program")
    options = p.parse_args()
    here, missing = installed([n for names in asked_for((ROOT / "setup.cfg").read_text()).values() for n in names])
    print(f"{len(here)} packages: {', '.join(here)}")
    if missing:
        print(f"not installed here, so not audited: {', '.join(missing)}")
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(here) + "\n")
        file.flush()
        words = [options.pip_audit, "-r", file.name, "--no-deps", "--disable-pip", "--progress-spinner", "off", "-f", "json"]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    try:
        report = json.loads(done.stdout)
    except ValueError:
        report = None
        print(done.stderr[-1000:])
    status, lines = verdict(report)
    print("\n".join(lines))
    return status


if __name__ == "__main__":
    sys.exit(main())
