"""This project beside what it is compared with, alternately, in one run."""
