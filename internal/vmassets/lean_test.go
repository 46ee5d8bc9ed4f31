package vmassets

import (
	"bytes"
	"testing"
)

func TestUnsigned(t *testing.T) {
	t.Parallel()
	const mark = "~Module signature appended~\n"
	code := []byte("\x7fELF the module")
	signed := func(about []byte, signature string) []byte {
		return bytes.Join([][]byte{code, []byte(signature), about, []byte(mark)}, nil)
	}
	for name, test := range map[string]struct{ in, want []byte }{
		"signed":       {signed([]byte{0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0, 5}, "abcde"), code},
		"with signer":  {signed([]byte{0, 0, 1, 2, 1, 0, 0, 0, 0, 0, 0, 2}, "abcde"), code},
		"plain":        {code, code},
		"lying length": {signed([]byte{0, 0, 2, 0, 0, 0, 0, 0, 255, 255, 255, 255}, "abcde"), signed([]byte{0, 0, 2, 0, 0, 0, 0, 0, 255, 255, 255, 255}, "abcde")},
		"mark alone":   {[]byte(mark), []byte(mark)},
		"empty":        {nil, nil},
	} {
		if got := unsigned(test.in); !bytes.Equal(got, test.want) {
			t.Errorf("%s: %q, want %q", name, got, test.want)
		}
	}
}
