"""`python -m fedsender`."""

from fedsender.cli import main

if __name__ == "__main__":
    main()
