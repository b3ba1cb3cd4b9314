"""What tests share: real servers as processes, and the services run against them."""
