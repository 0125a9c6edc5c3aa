import json
import profile
import queue
import sys

print(json.WHO, profile.WHO, queue.WHO)
print(sys.modules["json"].__file__)
