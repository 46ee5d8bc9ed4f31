//go:build !linux

package krun

const (
	soName       = "libkrun.1.dylib"
	firmwareName = "libkrunfw.5.dylib"
)
