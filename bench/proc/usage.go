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
	// Written is what the process had the system write to disks so far, in bytes, as
	// the system counts it: whole pages, when they become dirty. -1 is not known.
	Written int64 `json:"written"`
}
