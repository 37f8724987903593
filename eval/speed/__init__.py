"""`dcar analyse what=speed`: what a decoding step costs against what the machine allows."""
