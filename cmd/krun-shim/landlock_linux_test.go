package main

import landlocksys "github.com/landlock-lsm/go-landlock/landlock/syscall"

// confinementIsOff reports whether this kernel lacks what the test expects:
// files since version 1, TCP since 4.
func confinementIsOff() bool {
	abi, err := landlocksys.LandlockGetABIVersion()
	return err != nil || abi < 4
}
