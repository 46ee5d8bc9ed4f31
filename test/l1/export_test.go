package l1

// Seams of the tests, which are in a package of their own.

var (
	Faults         = faults
	Mend           = mend
	AddressOf      = addressOf
	ErrUnknownQEMU = errUnknownQEMU
	LastLines      = lastLines
)

// Fault is a fault of QEMU.
type Fault = fault

// Code is the code that is looked for, with fill where builds differ.
func (f fault) Code(fill byte) (before, wrong, after []byte) {
	some := func(code []int) []byte {
		var out []byte
		for _, b := range code {
			if b == anyByte {
				b = int(fill)
			}
			out = append(out, byte(b))
		}
		return out
	}
	return some(f.before), some(f.wrong), some(f.after)
}

func (f fault) Find(program []byte) (int64, error) { return f.find(program) }

func (f fault) Mended(wrong []byte) []byte { return f.mended(wrong) }
