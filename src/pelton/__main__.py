"""``python -m pelton``: the command line."""

from pelton.serving.cli.main import main

if __name__ == "__main__":
    main()
