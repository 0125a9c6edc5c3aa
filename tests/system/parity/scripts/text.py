import atexit
import sys

atexit.register(print, "atexit")
sys.exit("text for stderr")
