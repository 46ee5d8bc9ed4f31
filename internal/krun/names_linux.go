package krun

const (
	soName       = "libkrun.so.1"
	firmwareName = "libkrunfw.so.5"
)
