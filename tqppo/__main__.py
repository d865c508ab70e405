"""`python -m tqppo` is the command `tqppo`."""

from tqppo.cli import app

if __name__ == "__main__":
    app(prog_name="tqppo")
