package proc

import "time"

// Usage is what a process uses at one moment. On systems that do not tell, it is
// zero.
type Usage struct {
	// RSS is all memory that is resident, RssAnon that of no file, in bytes.
	RSS     int64 `json:"rss"`
	RssAnon int64 `json:"rss_anon"`
	// Files is the number of open file descriptors.
	Files int `json:"files"`
	// Work is the processor time so far, in steps of 10 ms.
	Work time.Duration `json:"work"`
}
