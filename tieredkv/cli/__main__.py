"""`python -m tieredkv.cli`: the command line where the console script is not on the path. Imports: this package."""

from __future__ import annotations

from tieredkv.cli import main

if __name__ == "__main__":
    main()
