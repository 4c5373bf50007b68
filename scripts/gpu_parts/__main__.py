"""python -m gpu_parts FILE '[["steps.machine", {"device": "cuda"}], ...]' calls one function after the other.

Each row goes into the file as it comes, as a JSON line: what was found before a part fails or is stopped is kept.
"""

import dataclasses
import importlib
import json
import sys

with open(sys.argv[1], "a", encoding="utf-8") as file:
    for name, options in json.loads(sys.argv[2]):
        module, function = name.split(".")
        for row in getattr(importlib.import_module(f"gpu_parts.{module}"), function)(**options):
            print(json.dumps(dataclasses.asdict(row)), file=file, flush=True)
