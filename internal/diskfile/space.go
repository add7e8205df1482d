package diskfile

import "syscall"

// Space returns the bytes of the file system that holds a path: those that this user may write, and all.
func Space(path string) (free, size uint64, err error) {
	var fs syscall.Statfs_t
	if err := syscall.Statfs(path, &fs); err != nil {
		return 0, 0, err
	}
	block := uint64(fs.Bsize)
	return fs.Bavail * block, fs.Blocks * block, nil
}
