"""`python -m gear_loader` is `gear-loader`."""

from gear_loader.cli import app

if __name__ == "__main__":
    app(prog_name="python -m gear_loader")
