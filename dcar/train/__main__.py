"""`python -m dcar.train`: stage one."""

from dcar.train.car import main

if __name__ == "__main__":
    main()
