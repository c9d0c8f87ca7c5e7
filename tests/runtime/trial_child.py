"""Does what the child process of `untrusted.check` does: `python -m tests.runtime.trial_child BUNDLE PART...`
tries parts of a bundle."""

from __future__ import annotations

from mlcbuild_runtime import untrusted

if __name__ == "__main__":
    untrusted.work()
