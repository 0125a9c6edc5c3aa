WHO = "the one beside the script"
