"""Training on two ranks, of which the second starts over without the PYTHONPATH it was given."""

import os
import sys


def main():
    if os.environ["RANK"] == "1" and "SILENT" not in os.environ:
        os.environ["SILENT"] = "1"
        os.environ["PYTHONPATH"] = ""
        os.execv(sys.executable, [sys.executable, *sys.argv])

    import quick

    quick.main()


if __name__ == "__main__":
    main()
