import os

value = 6 * 7
if os.environ["RANK"] == "1":
    breakpoint()
print("after", value)
