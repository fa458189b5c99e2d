"""python -m rectgrad"""

from rectgrad.cli import main

if __name__ == "__main__":
    main()
