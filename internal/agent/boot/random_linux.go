package boot

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// reseed makes the kernel's random numbers this VM's own, even if the guest is a
// resumed copy: it adds the token, 128 random bits of the host that no two VMs
// share, and has the generator draw a new key at once, which also takes what the
// processor offers (random(4), RNDRESEEDCRNG).
func reseed(token string) error {
	f, err := os.OpenFile("/dev/urandom", os.O_WRONLY, 0)
	if err != nil {
		return fmt.Errorf("seed the random numbers: %w", err)
	}
	defer f.Close() //nolint:errcheck // nothing is buffered
	seed := sha256.Sum256([]byte("iii guest " + token))
	if _, err := f.Write(seed[:]); err != nil {
		return fmt.Errorf("seed the random numbers: %w", err)
	}
	// ENODATA: it never had a key, and its first one will be of what was added.
	if err := unix.IoctlSetInt(int(f.Fd()), unix.RNDRESEEDCRNG, 0); err != nil && !errors.Is(err, unix.ENODATA) {
		return fmt.Errorf("draw a new key for the random numbers: %w", err)
	}
	return nil
}
