package imagestore

import (
	"errors"
	"fmt"
	"strings"
	"syscall"

	"github.com/iii-hq/workers/sandbox-libkrun/internal/erofs"
)

// ErrNotCached is what errors.Is finds when an image is not in the store and may
// not be pulled.
var ErrNotCached = errors.New("image is not in the store")

// LimitError tells that an image is larger than Options.Limits allow.
type LimitError = erofs.LimitError

// EntryError tells that a layer has an entry that no image may have.
type EntryError = erofs.EntryError

// NotCachedError is [ErrNotCached] with the reference.
type NotCachedError struct{ Ref string }

// Error says how to get the image.
func (e *NotCachedError) Error() string {
	if strings.HasPrefix(e.Ref, "sha256:") {
		return fmt.Sprintf("image %s is not in the store: pull the reference it came from", e.Ref)
	}
	return fmt.Sprintf("image %s is not in the store: pull it with \"adapter image pull %s\" or set auto_install: true", e.Ref, e.Ref)
}

// Is makes errors.Is(err, ErrNotCached) true.
func (e *NotCachedError) Is(target error) bool { return target == ErrNotCached }

// ReferenceError tells that a reference cannot be read.
type ReferenceError struct {
	Ref string
	Err error
}

// Error names the reference and what is wrong with it.
func (e *ReferenceError) Error() string {
	return fmt.Sprintf("image reference %q: %v", e.Ref, e.Err)
}

// Unwrap returns the reason.
func (e *ReferenceError) Unwrap() error { return e.Err }

// PlatformError tells that an image exists, but not for this processor.
type PlatformError struct {
	// Want is the platform that was looked for, Have those that the image has,
	// "linux/amd64" each.
	Ref, Want string
	Have      []string
}

// Error lists what there is.
func (e *PlatformError) Error() string {
	have := strings.Join(e.Have, ", ")
	if have == "" {
		have = "none at all"
	}
	return fmt.Sprintf("image %s is not made for %s, only for %s: choose another image or build it for %s", e.Ref, e.Want, have, e.Want)
}

// DigestError tells that content is not what its digest promised.
type DigestError struct {
	// What is the content, "layer 3 of 5" for example.
	What      string
	Want, Got string
}

// Error names the content and both digests or sizes.
func (e *DigestError) Error() string {
	return fmt.Sprintf("%s is damaged or was tampered with: it should be %s and is %s", e.What, e.Want, e.Got)
}

// LayoutError tells that an OCI layout, a docker archive or an image in it cannot
// be used.
type LayoutError struct {
	// Path is the layout or archive, or the reference for a registry's image.
	Path   string
	Reason string
	Err    error // may be nil
}

// Error names the path and the reason.
func (e *LayoutError) Error() string {
	if e.Err != nil {
		return fmt.Sprintf("%s: %s: %v", e.Path, e.Reason, e.Err)
	}
	return e.Path + ": " + e.Reason
}

// Unwrap returns the cause, if there is one.
func (e *LayoutError) Unwrap() error { return e.Err }

// RegistryError tells that a registry does not give an image out.
type RegistryError struct {
	Ref string
	// Status is the HTTP status of its answer, 0 when there was none.
	Status int
	Err    error
}

// Error says what the status usually means.
func (e *RegistryError) Error() string {
	switch e.Status {
	case 401, 403:
		return fmt.Sprintf("registry refuses image %s (%d): check the name, or log in with docker login: %v", e.Ref, e.Status, e.Err)
	case 404:
		return fmt.Sprintf("registry has no image %s (404): check name and tag: %v", e.Ref, e.Err)
	case 429:
		return fmt.Sprintf("registry limits how often image %s may be pulled (429): log in with docker login or wait: %v", e.Ref, e.Err)
	case 0:
		return fmt.Sprintf("registry of image %s cannot be reached: check the network, or put an OCI layout in III_SANDBOX_IMAGE_DIR: %v", e.Ref, e.Err)
	default:
		return fmt.Sprintf("registry fails for image %s (%d): try again later: %v", e.Ref, e.Status, e.Err)
	}
}

// Unwrap returns the answer or the network's error.
func (e *RegistryError) Unwrap() error { return e.Err }

// CredentialsError tells that the credentials for a registry cannot be had, because
// of docker's configuration or a credential helper.
type CredentialsError struct {
	Host string
	Err  error
}

// Error says where to look.
func (e *CredentialsError) Error() string {
	return fmt.Sprintf("credentials for %s cannot be read: check docker's config.json and its credential helper: %v", e.Host, e.Err)
}

// Unwrap returns the cause.
func (e *CredentialsError) Unwrap() error { return e.Err }

// InsecureError tells that a registry would have been talked to without TLS.
type InsecureError struct{ Host string }

// Error says how to allow it.
func (e *InsecureError) Error() string {
	return fmt.Sprintf("registry %s is not asked over plain http: add it to III_INSECURE_REGISTRIES if you trust the network to it", e.Host)
}

// InUseError tells that an image cannot be removed now.
type InUseError struct {
	Digest string
	// By is what uses it, "a running VM" or the name of a pin.
	By string
}

// Error says what uses the image.
func (e *InUseError) Error() string {
	return fmt.Sprintf("image %s is in use by %s: end that first", e.Digest, e.By)
}

// NoSpaceError tells that the store's file system is full, or the user's quota.
type NoSpaceError struct {
	Dir string
	// Need is about how many bytes the image takes while it is made, 0 if unknown.
	Need int64
	Err  error
}

// Error says how much is needed and what to do.
func (e *NoSpaceError) Error() string {
	need := ""
	if e.Need > 0 {
		need = fmt.Sprintf(" needs about %d MiB,", e.Need>>20+1)
	}
	return fmt.Sprintf("no space left in %s:%s free some (\"adapter image gc\") or set III_SANDBOX_CACHE_DIR to another disk", e.Dir, need)
}

// Unwrap returns the file system's error.
func (e *NoSpaceError) Unwrap() error { return e.Err }

// named turns a full disk's error into a [NoSpaceError] and leaves others alone.
func (s *Store) named(err error, need int64) error {
	if !errors.Is(err, syscall.ENOSPC) && !errors.Is(err, syscall.EDQUOT) {
		return err
	}
	return &NoSpaceError{Dir: s.dir, Need: need, Err: err}
}
