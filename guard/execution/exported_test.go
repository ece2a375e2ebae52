package execution

var (
	ErrCut        = errCut
	ErrDiffers    = errDiffers
	ErrExport     = errExport
	ErrLayout     = errLayout
	ErrNoSource   = errNoSource
	ErrRunning    = errRunning
	ErrTarget     = errTarget
	ErrUnfinished = errUnfinished
)

func (f *Flight) Follow() *Follower { return f.follow() }

func (r *Recording) Size() int64 { return r.written() }
