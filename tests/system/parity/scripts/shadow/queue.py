WHO = "my queue"
