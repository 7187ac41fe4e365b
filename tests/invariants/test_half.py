"""In half precision, weights move by what bf16 copies of them learn, and stay in fp32 themselves."""
