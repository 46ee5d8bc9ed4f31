//go:build !cgo

package libkrun_test

// hasChild tells that this program can be the child of a VM.
const hasChild = false
