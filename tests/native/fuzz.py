"""Runs the cases of kernels.cpp at every level, in a process that has the sanitizers loaded
(tests/test_sanitizers.py). They end it at the first error; its last line says where it was.

    python fuzz.py turboquant_sanitized.so SEEDS
    python fuzz.py turboquant_sanitized.so "read beyond"
"""

import importlib.util
import sys


def main(path: str, task: str) -> None:
    spec = importlib.util.spec_from_file_location("turboquant_sanitized", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not task.isdecimal():
        module.misbehave(task, 0)
        return
    for seed in range(int(task)):
        for case in module.CASES:
            results = {}
            for level in module.LEVELS:
                print(f"case {case}, level {level}, seed {seed}", flush=True)
                results[level] = module.run(case, level, seed)
            wrong = [name for name, result in results.items() if result != results["portable"]]
            if wrong or not results["portable"]:
                sys.exit(f"{case}, seed {seed}: not what portable wrote: {wrong}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
