"""Small networks in the form that other packages load: a plain configuration, or plain PyTorch source."""
