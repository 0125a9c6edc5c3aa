WHO = "my profile"
