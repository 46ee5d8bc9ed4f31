//go:build cgo

package krun_test

import "errors"

func hideKVM(string) error { return errors.New("there is no /dev/kvm here") }
